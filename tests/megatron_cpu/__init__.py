"""Lets Megatron's real ``pretrain()`` run on CPU processes joined by gloo. For tests and the demo only.

Megatron asserts a GPU, places tensors on the device ``cuda`` and orders work with streams and events. ``shim.install``
replaces exactly those by what they mean on one CPU thread: the device is the CPU, every call has finished when it
returns, and the GPU's random generator is the CPU's. The model's arithmetic stays Megatron's and torch's own.

Use ``python -m tests.megatron_cpu SCRIPT [ARGS...]`` to run an unedited script under it, or call ``shim.install()``
before the first import of megatron. ``client.PretrainServer`` runs whole trainings for tests. Nothing in the package
``mok_megatron`` may import this one.
"""
