"""kvtier inside vLLM: `"spec_name": "KVTierSpec", "spec_module_path": "kvtier.vllm"`.

The only package that imports vLLM or torch.
"""

from kvtier.vllm.spec import KVTierSpec

__all__ = ["KVTierSpec"]
