from pdtool.api import check as check
from pdtool.api import codegen as codegen
from pdtool.api import partition as partition
from pdtool.api import profile as profile
from pdtool.api import run as run
from pdtool.api import simulate as simulate

__version__: str
