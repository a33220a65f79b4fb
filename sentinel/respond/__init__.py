"""From a finding to a decision: incidents, the policy's ladders, and the judge that holds them together. Pure."""
