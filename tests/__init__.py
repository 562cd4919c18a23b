"""Tests of mok_megatron; `tests.distributed` spawns ranks, `tests.routing_cases` is the one case table."""
