// Command report shows what runs of the benchmark have left.
//
//	report DIRECTORY              draw its curves, as SVG and PNG
//	report -compare BEFORE AFTER  print what changed between two
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/forkvm/forkvm/bench"
	"github.com/forkvm/forkvm/bench/picture"
)

func main() {
	compare := flag.Bool("compare", false, "compare two directories")
	flag.Parse()
	if flag.NArg() != 1 && !*compare || flag.NArg() != 2 && *compare {
		fmt.Fprintln(os.Stderr, "usage: report DIRECTORY | report -compare BEFORE AFTER")
		os.Exit(2)
	}
	if err := report(*compare, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func report(compare bool, dirs []string) error {
	reports := make([]bench.Report, len(dirs))
	for i, dir := range dirs {
		var err error
		if reports[i], err = bench.Read(dir); err != nil {
			return err
		}
	}
	if compare {
		return bench.Compare(os.Stdout, reports[0], reports[1])
	}
	paths, err := picture.Draw(dirs[0], reports[0].Curves)
	for _, path := range paths {
		fmt.Println(path)
	}
	return err
}
