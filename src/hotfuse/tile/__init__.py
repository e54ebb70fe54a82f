"""The fusion ISA: the tile-level instruction set in which every fused kernel is written before it becomes machine code."""
