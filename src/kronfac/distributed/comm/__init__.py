"""Messages between ranks: process groups, collectives, buckets and their traffic."""
