"""Workers of vLLM on a GPU: copies of its core, which has imported vLLM already."""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from fp8core.processes.variables import set_variables

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class ForkingExecutor(MultiprocExecutor):
    """vLLM's executor of several processes, in a core that computes nothing itself.

    Our process has opened CUDA, so the core is spawned and imports vLLM anew: 14 s on a GPU host. The core has not, and
    its workers need not: forking is vLLM's own default there.
    """

    def _init_executor(self) -> None:
        set_variables({METHOD: "fork"}, {})
        super()._init_executor()
