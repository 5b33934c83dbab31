"""The original as a baseline: CDMPP's published implementation rebuilt, on the same data and split.

``cdmpp train --config configs/reference.toml`` trains it; nothing of its code is used. What it keeps: 164
features per leaf, min-max normalised, with its positional encoding; one encoder of 11 layers, 4 heads and a
feed-forward of 2,048 for all, one flatten layer per leaf count, batches of one leaf count; eight numbers per
device; Box-Cox labels; 1000 * MSE + MAPE on the labels; Adam with its cyclic rate; MMD or CMD on the
decoder's last hidden layer.

Where it differs, and why:

- features are those of today's TVM, one row per written buffer without a tree, so that a row's number stands
  for its position;
- transforms are fitted on training rows and the domain regulariser sees unlabelled *training* rows of the
  target: the original fits and regularises on the test part;
- the order of the samples changes from epoch to epoch, which the original means to do and does not;
- statistics of the batch normalisations are taken anew at the end: their moving averages would not have
  settled in a short run;
- a leaf count that was not trained on gets the median training latency, where the original says 0.
"""
