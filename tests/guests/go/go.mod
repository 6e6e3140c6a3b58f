module golang

go 1.24
