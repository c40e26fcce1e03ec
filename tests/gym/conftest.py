"""Makes the families of variants importable as `families` here and in the scripts of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
