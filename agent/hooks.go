package agent

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/forkvm/forkvm/agent/proto"
)

// hooks lists the programs that a clone has to run before its first command, in
// the order of their names.
func (a *Agent) hooks() []string {
	if a.cfg.HooksDir == "" {
		return nil
	}
	entries, err := os.ReadDir(a.cfg.HooksDir)
	if err != nil {
		return nil // usually there is no such directory
	}
	var list []string
	for _, e := range entries {
		path := filepath.Join(a.cfg.HooksDir, e.Name())
		// Leftovers of editors and package managers do not count.
		if strings.HasPrefix(e.Name(), ".") || strings.ContainsAny(e.Name(), "~") || strings.Contains(e.Name(), ".dpkg-") {
			continue
		}
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			list = append(list, path)
		}
	}
	return list
}

// runHooks runs one after the other, and stops at the first that fails.
func (a *Agent) runHooks(list []string, generation string) error {
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.HooksTimeout)
	defer cancel()
	for _, path := range list {
		if err := a.runHook(ctx, path, generation); err != nil {
			return fmt.Errorf("hook %s: %w", path, err)
		}
	}
	return nil
}

func (a *Agent) runHook(ctx context.Context, path, generation string) error {
	var all logs
	output := newStreamLog(&all)
	x := &execution{
		agent: a, ctx: ctx, sink: func(uint16) sink { return output },
		request: proto.ExecRequest{
			Args: []proto.Text{proto.Text(path)}, Dir: "/", Stderr: proto.OutputStdout,
			Env: []proto.Text{proto.Text("FORKVM_GENERATION=" + generation)},
		},
	}
	if err := x.launch(); err != nil {
		return err
	}
	result := x.run()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("still running after %v", a.cfg.HooksTimeout)
	case result.ExitCode != 0:
		return fmt.Errorf("exit code %d%s", result.ExitCode, lastLine(output))
	}
	return nil
}

// lastLine is the end of what a hook wrote, as part of a message.
func lastLine(output *streamLog) string {
	var tail [256]byte
	r := output.reader(max(0, output.status().Bytes-int64(len(tail))), false)
	defer r.leave()
	text := bytes.TrimSpace(tail[:r.read(tail[:])])
	if len(text) == 0 {
		return ""
	}
	return ": " + string(text[bytes.LastIndexByte(text, '\n')+1:])
}
