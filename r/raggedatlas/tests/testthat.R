library(testthat)
library(raggedatlas)

test_check("raggedatlas")
