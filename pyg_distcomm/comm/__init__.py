"""Connects ranks: the mesh, collectives and their adjoints, the ledger, failures."""
