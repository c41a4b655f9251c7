"""What can be told of a model folder without reading weights, by the code that serves it; a process of its
own for `headway inspect`."""
