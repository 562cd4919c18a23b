"""The verbs of ``mok-megatron``, one module each; a module here is a verb, there is no other registration.

A module defines ``add_parser(subparsers)``: it adds its parser and sets ``run=function`` as a default of it.
``function(args: argparse.Namespace) -> int`` returns the exit code. ``--help`` imports every module, so what is heavy
(torch, megatron, numpy, the planner) is imported inside that function. For a mistake of the user it raises ValueError
or OSError, which the command line turns into one line on stderr and exit code 2.
"""
