"""Codecs: how rows are written on the wire, one idea a file."""

from pyg_distcomm.exchange.codec import Codec as Codec
from pyg_distcomm.exchange.codec import Draw as Draw
from pyg_distcomm.exchange.codec import State as State
from pyg_distcomm.exchange.codecs.chain import Chain as Chain
from pyg_distcomm.exchange.codecs.mask import ColumnMask as ColumnMask
from pyg_distcomm.exchange.codecs.names import CODECS as CODECS
from pyg_distcomm.exchange.codecs.names import codec_of as codec_of
from pyg_distcomm.exchange.codecs.plain import Cast as Cast
from pyg_distcomm.exchange.codecs.plain import Plain as Plain
from pyg_distcomm.exchange.codecs.quantise import Quantise as Quantise
from pyg_distcomm.exchange.codecs.residual import Residual as Residual
from pyg_distcomm.exchange.codecs.residual import fresh_state as fresh_state
from pyg_distcomm.exchange.codecs.rows import RowSample as RowSample
from pyg_distcomm.exchange.codecs.sparse import Bitmap as Bitmap
from pyg_distcomm.exchange.codecs.sparse import TopK as TopK
