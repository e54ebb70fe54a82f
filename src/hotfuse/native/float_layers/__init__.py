"""Small layers of floats as native code that every file shares: convolutions at few places and LSTM layers, before code of a file's
own is there."""
