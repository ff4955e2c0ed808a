"""What every listener shares."""
