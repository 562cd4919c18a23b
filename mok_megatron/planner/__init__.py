"""Layout planner: valid parallel layouts of a model on given machines, their memory and predicted speed.

Modules, from facts to files: ``cluster`` (ranks on machines), ``candidate`` (sizes and why they are refused),
``pipeline`` (stages), ``layercost``, ``memory_use``, ``timing``, ``search``, ``report``, ``picture``, ``launch_files``.
"""
