// Package picture draws the benchmark's curves. It is the one package that
// imports a plotting library, and no program that measures imports it.
package picture

import (
	"fmt"
	"image/color"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"

	"github.com/forkvm/forkvm/bench"
)

const (
	width  = 16 * vg.Centimeter
	height = 10 * vg.Centimeter
)

// Draw writes one picture for each quantity that curves depend on, as SVG and as
// PNG, and returns the paths.
func Draw(dir string, curves []bench.Curve) ([]string, error) {
	var order []string
	groups := map[string][]bench.Curve{}
	for _, c := range curves {
		if groups[c.X] == nil {
			order = append(order, c.X)
		}
		groups[c.X] = append(groups[c.X], c)
	}
	var paths []string
	for _, x := range order {
		p, err := together(groups[x])
		if err != nil {
			return paths, fmt.Errorf("draw curves against %s: %w", x, err)
		}
		for _, kind := range []string{"svg", "png"} {
			path := filepath.Join(dir, groups[x][0].Name+"."+kind)
			if err := p.Save(width, height, path); err != nil {
				return paths, err
			}
			paths = append(paths, path)
		}
	}
	return paths, nil
}

// together draws curves with a common axis: medians, with a bar up to the highest
// sample.
func together(curves []bench.Curve) (*plot.Plot, error) {
	p := plot.New()
	p.BackgroundColor = color.White
	p.X.Label.Text, p.Y.Label.Text = curves[0].X, curves[0].Y
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, ticks(curves)
	p.Y.Min = 0
	p.Legend.Top, p.Legend.Left = true, true
	p.Add(plotter.NewGrid())
	for i, c := range curves {
		s := curve(c)
		line, points, err := plotter.NewLinePoints(s)
		if err != nil {
			return nil, err
		}
		bars, err := plotter.NewYErrorBars(s)
		if err != nil {
			return nil, err
		}
		line.Color, points.Color, bars.Color = plotutil.Color(i), plotutil.Color(i), plotutil.Color(i)
		points.Shape = plotutil.Shape(i)
		p.Add(line, points, bars)
		p.Legend.Add(c.Title, line, points)
		p.Y.Max = max(p.Y.Max, 1.3*highest(c))
	}
	return p, nil
}

// curve is a curve as package plotter wants it.
type curve bench.Curve

func (c curve) Len() int                { return len(c.Points) }
func (c curve) XY(i int) (x, y float64) { return c.Points[i].X, c.Points[i].Y.P50 }
func (c curve) YError(i int) (low, up float64) {
	return 0, c.Points[i].Y.Max - c.Points[i].Y.P50
}

func highest(c bench.Curve) float64 {
	var most float64
	for _, p := range c.Points {
		most = max(most, p.Y.Max)
	}
	return most
}

// ticks are at the points themselves: there are few.
func ticks(curves []bench.Curve) plot.ConstantTicks {
	var t plot.ConstantTicks
	seen := map[float64]bool{}
	for _, c := range curves {
		for _, p := range c.Points {
			if !seen[p.X] {
				t = append(t, plot.Tick{Value: p.X, Label: fmt.Sprintf("%g", p.X)})
			}
			seen[p.X] = true
		}
	}
	return t
}
