"""The report: its sections, tables and pictures on one page."""
