"""What a model's code asks besides computing, of types and arguments: what a trace answers, and what calls are checked for."""
