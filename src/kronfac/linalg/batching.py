"""When matrices are small enough to be worth batching."""

#: Larger matrices keep a processor busy on their own, and copying them into a batch would cost memory.
MAX_ELEMENTS = 2**18
#: Elements of a batch of larger ones on other devices: 256 MB in single precision.
MAX_BATCH_ELEMENTS = 2**26
