"""Describes a model folder without reading weights, by the code that serves it, in a process of its own for
`headway inspect`."""
