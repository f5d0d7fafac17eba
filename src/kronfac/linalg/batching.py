"""When matrices are small enough to be worth batching."""

#: Larger matrices keep a device busy on their own, and copying them into a batch would cost memory.
MAX_ELEMENTS = 2**18
