package lab

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
)

// goBuild builds a static program without traces of where it was built, so that the same source gives the same bytes.
func goBuild(ctx context.Context, to, pkg string) error {
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", to, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return nil
}
