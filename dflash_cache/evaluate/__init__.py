"""What a drafter is worth: real speculative decoding against a target, checked against the target's own greedy output.

1. ``session``: the target reads tokens into its cache, gives logits and fc features, and forgets rejected tokens.
2. ``proposer``: where drafts come from; a trained drafter, or anything else that fills a block.
3. ``decoding``: the two loops, greedy and speculative.
4. ``results``: what they return, compared and summed up.
"""
