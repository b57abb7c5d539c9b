"""Source to catalog: plan (every refusal that needs no values), value policy, write, column-sorted copy."""
