"""What vLLM loads in every process: the entry point `sparsekv` of the group `vllm.general_plugins`."""

from __future__ import annotations

from sparsekv.runtime.vllm.checks import check_version
from sparsekv.runtime.vllm.settings import Serving, settings_path

BACKEND = "sparsekv.runtime.vllm.backend.SparseBackend"


def register() -> None:
    """Make `--attention-backend CUSTOM` this backend. A CPU knows one backend only, which is replaced where a settings
    file is named. Raises SparseKVError for a settings file that cannot be read, and for a version of vLLM that is not
    served."""
    path = settings_path()
    if path is not None:
        from vllm import __version__

        check_version(__version__)
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if path is None:
        return
    Serving.load(path)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
