"""The precision tripwire: a run stops at the first half-precision tensor it makes.

``mode`` has the torch dispatch mode, ``arm`` switches it on when verl imports it in a worker
(``actor_rollout_ref.model.external_lib=verl_p40.tripwire.arm``), ``record`` is what the
supervisor reads. Only ``record`` is importable without torch.
"""

ARM_MODULE = "verl_p40.tripwire.arm"
