"""``mok-megatron doctor``: facts about this machine (probes.py), what follows from them (checks.py), and the report.

The seam is ``Facts``, plain data: probes fill it, checks read nothing else, so that tests describe any machine. A new
check is a function ``Facts -> Iterator[Finding]`` in ``checks.CHECKS``; a new fact is a field with a neutral default.
"""
