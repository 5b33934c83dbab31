"""Work on several processes or machines with Ray (extra ``ray``). Results equal those of one process."""
