package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Files that a run leaves in its directory.
const (
	resultsFile = "results.json" // an array of rows
	detailsFile = "details.json" // a Report without its rows
)

// details is the content of details.json.
type details struct {
	Phases []Breakdown `json:"phases"`
	Curves []Curve     `json:"curves"`
	Notes  []string    `json:"notes,omitempty"`
}

// Write leaves the report in a directory.
func (r Report) Write(dir string) error {
	if err := writeJSON(filepath.Join(dir, resultsFile), r.Results); err != nil {
		return err
	}
	return writeJSON(filepath.Join(dir, detailsFile), details{r.Phases, r.Curves, r.Notes})
}

// Read reads what Write has left.
func Read(dir string) (Report, error) {
	var r Report
	if err := readJSON(filepath.Join(dir, resultsFile), &r.Results); err != nil {
		return r, err
	}
	var d details
	err := readJSON(filepath.Join(dir, detailsFile), &d)
	r.Phases, r.Curves, r.Notes = d.Phases, d.Curves, d.Notes
	return r, err
}

func writeJSON(path string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o644)
}

func readJSON(path string, v any) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}
