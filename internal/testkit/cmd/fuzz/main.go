// Fuzz runs every fuzz target of the packages named, each for a given time, two at a time.
//
//	fuzz [-time 10s] [-jobs 2] [packages]
//
// The go command fuzzes one target of one package per call; this finds the targets. Inputs that fail are written to the
// package's testdata by the go command, whose output is shown for a target that fails.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	duration := flag.Duration("time", 10*time.Second, "how long each target runs")
	jobs := flag.Int("jobs", 2, "how many run at the same time, on one processor each")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, flag.Args(), *duration, max(1, *jobs)); err != nil {
		fmt.Fprintf(os.Stderr, "fuzz: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, patterns []string, duration time.Duration, jobs int) error {
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	targets, err := find(ctx, patterns)
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	var mu sync.Mutex // guards failed and the output
	failed := 0
	slots := make(chan struct{}, jobs)
	for _, t := range targets {
		slots <- struct{}{}
		if ctx.Err() != nil {
			break
		}
		group.Go(func() {
			defer func() { <-slots }()
			verdict, output, err := t.fuzz(ctx, duration)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed++
				fmt.Printf("%s--- FAIL: %s %s: %v\n", output, t.importPath, t.name, err)
				return
			}
			fmt.Printf("ok  \t%s\t%s %s\n", t.importPath, t.name, verdict)
		})
	}
	group.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	fmt.Printf("fuzz: %d passed, %d failed\n", len(targets)-failed, failed)
	if failed > 0 {
		return fmt.Errorf("%d of %d targets failed", failed, len(targets))
	}
	return nil
}

// target is one fuzz function.
type target struct{ importPath, name string }

// find lists the fuzz functions of the packages, in the order of the go command.
func find(ctx context.Context, patterns []string) ([]target, error) {
	const format = `{{$p := .}}{{range .TestGoFiles}}{{$p.ImportPath}} {{$p.Dir}}/{{.}}{{"\n"}}{{end}}` +
		`{{range .XTestGoFiles}}{{$p.ImportPath}} {{$p.Dir}}/{{.}}{{"\n"}}{{end}}`
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-f", format, "--"}, patterns...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list packages: %w", err)
	}
	var targets []target
	for line := range strings.Lines(string(out)) {
		importPath, file, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			continue
		}
		names, err := fuzzFunctions(file)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			targets = append(targets, target{importPath, name})
		}
	}
	return targets, nil
}

// fuzzFunctions returns the names of a file's functions FuzzXxx(*testing.F).
func fuzzFunctions(path string) ([]string, error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", filepath.Base(path), err)
	}
	var names []string
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Fuzz") && takesF(f) {
			names = append(names, f.Name.Name)
		}
	}
	return names, nil
}

func takesF(f *ast.FuncDecl) bool {
	if f.Type.Params.NumFields() != 1 {
		return false
	}
	star, ok := f.Type.Params.List[0].Type.(*ast.StarExpr)
	if !ok {
		return false
	}
	selector, ok := star.X.(*ast.SelectorExpr)
	return ok && selector.Sel.Name == "F"
}

var progress = regexp.MustCompile(`execs: (\d+)`)

// fuzz runs one target. The verdict is how many inputs it tried.
func (t target) fuzz(ctx context.Context, duration time.Duration) (verdict, output string, err error) {
	for attempt := 0; ; attempt++ {
		output, err = t.goTest(ctx, duration)
		// The go command sometimes takes the end of its own time for a failure of the target. Then it names no input.
		if err == nil || attempt == 2 || !strings.Contains(output, "context deadline exceeded") || strings.Contains(output, "Failing input") {
			break
		}
	}
	tried := "0"
	for _, match := range progress.FindAllStringSubmatch(output, -1) {
		tried = match[1]
	}
	return fmt.Sprintf("(%s inputs in %v)", tried, duration), output, err
}

func (t target) goTest(ctx context.Context, duration time.Duration) (string, error) {
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-fuzz", "^"+t.name+"$", "-fuzztime", duration.String(),
		"-parallel", "1", t.importPath)
	cmd.Stdout, cmd.Stderr = &said, &said
	// Its workers are processes of their own, and end with it when it is asked to end.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	err := cmd.Run()
	return said.String(), err
}
