"""Workers of vLLM on a GPU as copies of its core."""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from fp8core.processes.variables import set_variables

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class ForkingExecutor(MultiprocExecutor):
    """Our process has opened CUDA, so vLLM's core is spawned and imports vLLM anew: 14 s on a GPU host. The core
    computes nothing: its workers may be forked, as is vLLM's own default.
    """

    def _init_executor(self) -> None:
        set_variables({METHOD: "fork"}, {})
        super()._init_executor()
