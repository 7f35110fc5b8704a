"""The runtime's tiny models and artifacts serve here too. Tests marked `vllm` run in an environment of their own, by
`make test-vllm`; elsewhere they are deselected, as the settings of pytest in pyproject.toml say."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
