// Command forkvm-vm is the process of a VM without a network card. It is a program of its own because a Go program initialises
// all of its packages whenever it starts, and this one does so for each VM: the command line and what belongs to it would be
// waited for each time. forkvm starts it; people do not.
package main

import (
	"os"

	"github.com/forkvm/forkvm/internal/process"
)

func main() { os.Exit(process.Main("forkvm-vm", process.Options{})) }
