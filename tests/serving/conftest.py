"""Those that need vLLM run in an environment of their own, by `make test-vllm`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "runtime")]
