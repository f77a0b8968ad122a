"""Codecs: how rows are written on the wire, one idea a file."""

from pyg_distcomm.halo.codec import Codec as Codec
from pyg_distcomm.halo.codec import CodecState as CodecState
from pyg_distcomm.halo.codec import RngKey as RngKey
from pyg_distcomm.halo.codecs.chain import Chain as Chain
from pyg_distcomm.halo.codecs.mask import ColumnMask as ColumnMask
from pyg_distcomm.halo.codecs.names import CODECS as CODECS
from pyg_distcomm.halo.codecs.names import codec_of as codec_of
from pyg_distcomm.halo.codecs.plain import Cast as Cast
from pyg_distcomm.halo.codecs.plain import Plain as Plain
from pyg_distcomm.halo.codecs.quantise import Quantise as Quantise
from pyg_distcomm.halo.codecs.residual import Residual as Residual
from pyg_distcomm.halo.codecs.residual import fresh_state as fresh_state
from pyg_distcomm.halo.codecs.rows import RowSample as RowSample
from pyg_distcomm.halo.codecs.sparse import Bitmap as Bitmap
from pyg_distcomm.halo.codecs.sparse import TopK as TopK
