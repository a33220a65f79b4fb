"""What the daemon measures of its machine: one probe per file, none of which knows another."""
