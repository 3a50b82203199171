"""Pictures and pages that show what a search found."""
