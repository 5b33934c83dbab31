"""The original as a baseline: CDMPP's published implementation rebuilt, on the same data and split.

``cdmpp train --config configs/reference.toml`` trains it, ``configs/paper.toml`` with the domain regulariser; nothing
of its code is used. What it keeps: 164 features per leaf, min-max normalised, with its encoding of pre-order positions;
an encoder of 11 layers, 4 heads and a feed-forward of 2,048; eight numbers per device; Box-Cox labels; 1000 * MSE +
MAPE on the labels; Adam with its cyclic rate; MMD or CMD on the decoder's input.

Where it differs, and why:

- features are those of today's TVM, which merges the stores of a buffer into one row and leaves constant stores out;
- one flatten layer reads all leaf counts (the published padded mode). Published runs have one network for each leaf
  count; batches of one leaf count in one network have other statistics in the normalisations than predictions;
- one cycle of the rate takes the whole budget;
- transforms are fitted on training rows and the domain regulariser sees unlabelled *training* rows of the
  target: the original fits and regularises on the test part;
- the order of the samples changes from epoch to epoch, which the original means to do and does not.
"""
