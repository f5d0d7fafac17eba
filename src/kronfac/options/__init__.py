"""What a user can set, checked where it is given, and advice on it."""
