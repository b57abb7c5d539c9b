"""Source to catalog: plan (makes every refusal that needs no values), value policy, stage, commit."""
