"""Small layers of floats of a file through the native code that every file shares (`native.float_layers`)."""
