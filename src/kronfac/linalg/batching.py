"""When matrices are worth a batch."""

#: Larger matrices keep a device busy by themselves, and copies of them would cost memory.
MAX_ELEMENTS = 2**18
