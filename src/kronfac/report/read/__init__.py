"""What run folders say."""
