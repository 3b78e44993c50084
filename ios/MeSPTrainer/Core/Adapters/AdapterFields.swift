import Foundation
import MeSPFiles
import MeSPSentences

/// What an adapter_config.json may hold: exporter/mesp/adapters/fields.json, whose text says what its parts are. `tests/adapters/test_config.py`
/// holds the copy here equal to it.
struct AdapterFields: Decodable {
    let used: Set<String>
    let ignored: [String: String]
    let required: [String: Set<JSONValue>]

    /// Of PEFT's configuration, of mlx-lm's, and of the `lora_parameters` in that.
    static func all() throws -> (peft: AdapterFields, mlx: AdapterFields, loraParameters: AdapterFields) {
        struct Tables: Decodable {
            let peft, mlx, loraParameters: AdapterFields

            enum CodingKeys: String, CodingKey {
                case peft, mlx
                case loraParameters = "lora_parameters"
            }
        }
        let tables = try JSONDecoder().decode(Tables.self, from: Data(json.utf8))
        return (tables.peft, tables.mlx, tables.loraParameters)
    }

    /// Throws `MeSPError` that names a key whose value means what the trainer does not do.
    func check(_ config: [String: JSONValue]) throws {
        let found = config.sorted { $0.key < $1.key }.first { key, value in
            !used.contains(key) && ignored[key] == nil && !(required[key] ?? [.null]).contains(value)
        }
        guard let (key, value) = found else { return }
        if case .text(let text) = value { throw AdapterFormat.unsupported("\(key) \"\(text)\"") }
        throw AdapterFormat.unsupported(key)
    }

    private static let json = #"""
        {
          "about": "What an adapter_config.json may hold, of PEFT's LoraConfig, of mlx-lm and of mlx-lm's lora_parameters: `used`, what the readers read; `ignored`, what changes no number of a trained adapter, and why; `required`, the values that a key may have, as another means what the readers do not do. A key that is not here must be null.",
          "peft": {
            "used": [
              "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
              "target_modules", "exclude_modules", "layers_to_transform", "target_parameters"
            ],
            "ignored": {
              "auto_mapping": "names the class of the base model",
              "base_model_name_or_path": "names the base model; the bundle is the base model here",
              "corda_config": "is read where init_lora_weights is corda",
              "ensure_weight_tying": "is of embeddings and heads, whose tensors are refused",
              "eva_config": "is of the initial A",
              "fan_in_fan_out": "is of layers that no supported model has; PEFT sets it to false for linear ones",
              "inference_mode": "is of training",
              "loftq_config": "is read where init_lora_weights is loftq",
              "lora_dropout": "is of training",
              "lora_ga_config": "is read where init_lora_weights is lora_ga",
              "megatron_core": "is read where megatron_config is given",
              "peft_version": "names the writer",
              "qalora_group_size": "is read where use_qalora is true",
              "revision": "is of the base model",
              "runtime_config": "is not read from files by PEFT"
            },
            "required": {
              "alora_invocation_tokens": [null],
              "arrow_config": [null],
              "bias": [null, "none"],
              "init_lora_weights": [null, true, false, "gaussian", "eva", "orthogonal", "mica"],
              "kasa_config": [null],
              "layer_replication": [null, []],
              "layers_pattern": [null, [], "", "layers", ["layers"]],
              "lora_bias": [null, false],
              "megatron_config": [null],
              "modules_to_save": [null, []],
              "monteclora_config": [null],
              "peft_type": ["LORA"],
              "task_type": [null, "CAUSAL_LM"],
              "trainable_token_indices": [null],
              "use_bdlora": [null],
              "use_dora": [null, false],
              "use_qalora": [null, false],
              "velora_config": [null]
            }
          },
          "mlx": {
            "used": ["lora_parameters", "num_layers"],
            "ignored": {
              "adapter_path": "is of training",
              "batch_size": "is of training",
              "clear_cache_threshold": "is of training",
              "config": "is of training",
              "data": "is of training",
              "grad_accumulation_steps": "is of training",
              "grad_checkpoint": "is of training",
              "hf_dataset": "is of training",
              "iters": "is of training",
              "learning_rate": "is of training",
              "lr_schedule": "is of training",
              "mask_prompt": "is of training",
              "max_seq_length": "is of training",
              "model": "names the base model; the bundle is the base model here",
              "optimizer": "is of training",
              "optimizer_config": "is of training",
              "project_name": "is of training",
              "report_to": "is of training",
              "resume_adapter_file": "is of training",
              "save_every": "is of training",
              "seed": "is of training",
              "steps_per_eval": "is of training",
              "steps_per_report": "is of training",
              "test": "is of training",
              "test_batches": "is of training",
              "train": "is of training",
              "trust_remote_code": "is of the base model",
              "val_batches": "is of training",
              "wandb": "is of training"
            },
            "required": {
              "fine_tune_type": [null, "lora"]
            }
          },
          "lora_parameters": {
            "used": ["rank", "scale", "keys"],
            "ignored": {
              "dropout": "is of training"
            },
            "required": {}
          }
        }
        """#
}

/// A value of any JSON.
enum JSONValue: Decodable, Hashable {
    case null
    case flag(Bool)
    case number(Double)
    case text(String)
    case list([JSONValue])
    case object([String: JSONValue])

    init(from decoder: any Decoder) throws {
        let container = try decoder.singleValueContainer()
        if container.decodeNil() {
            self = .null
        } else if let flag = try? container.decode(Bool.self) {
            self = .flag(flag)
        } else if let number = try? container.decode(Double.self) {
            self = .number(number)
        } else if let text = try? container.decode(String.self) {
            self = .text(text)
        } else if let list = try? container.decode([JSONValue].self) {
            self = .list(list)
        } else {
            self = .object(try container.decode([String: JSONValue].self))
        }
    }
}
