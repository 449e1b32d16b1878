"""`python -m streambp_fx`: the same as `streambp-fx`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
