"""Rewake beside other engines: `python -m bench.peers [--quick] [--check [GROUP]] [--json FILE] [--peers a,b,...]`.

    base       what a peer is: an environment of its own, and a worker process in it
    ours, transformers, llama_cpp, vllm      one file for each; it runs on both sides of the pipe
    prompts    the token ids all of them get
    own        what only concerns ourselves: attention alone, a step's growth with depth, the restore
    kernels    the group `kernels`: what is measured, in which order, and the bars

Another group is another module with a `measure`, named in `__main__.GROUPS`.
"""
