"""Run `llmsys estimate` from a checkout without the command installed: `python tools/estimate.py
CONFIG [key=value
…]`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmsys.launch.main import main

if __name__ == "__main__":
    sys.exit(main(["estimate", *sys.argv[1:]]))
