"""Any number of prompts through one model in few passes: lines in, answers out, in order and durable."""
