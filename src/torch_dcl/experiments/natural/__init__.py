"""Section 4.2.1: natural images. Table 2, and the chart that sets DCL beside what else could stand in its place."""
