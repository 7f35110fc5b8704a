"""`sparsekv capture`: the capture stage, whose generated windows the runtime writes."""

from __future__ import annotations

from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.store.store import CaptureStore


def capture(config: CaptureConfig) -> CaptureStore:
    """Capture `config.num_documents` windows. Raises SparseKVError as `run_capture`."""
    from sparsekv.runtime.hf.attach import writing

    return run_capture(config, generator=writing)
